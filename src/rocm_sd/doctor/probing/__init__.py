"""Where the probes run, each in a process of its own: python -m rocm_sd.doctor.probing NAME '{"quick": true}'.

What a probe measures stands in the file of its check. It gives one JSON object, in which `device` says where it ran;
`{"cannot": reason}` is said instead where there is nothing to run on. A driver's fault or an endless search ends a
process: what may do that runs in a further process (`isolated`), so that the probe lives to tell.
"""
