from __future__ import annotations

import json

import pytest

from rocm_sd import arch
from rocm_sd.bench.profiling import UnreadableTrace, analyse, findings, read_rocprof
from rocm_sd.bench.profiling.families import ATTENTION, CONVOLUTION, GEMM, IDLE, MEMSET

HEAD = (
    '"Kind","Agent_Id","Queue_Id","Stream_Id","Thread_Id","Dispatch_Id","Kernel_Id","Kernel_Name","Correlation_Id",'
    '"Start_Timestamp","End_Timestamp","LDS_Block_Size"\n'
)
DISPATCHES = [
    ("__amd_rocclr_fillBufferAligned", 1_000_000, 1_010_000),
    ("void ck::kernel_gemm_xdl<float, 2>(float*, int)", 1_010_000, 1_030_000),
    ("naive_conv_ab_nonpacked_fwd_nchw_half_double_half", 1_030_000, 1_070_000),
    ("attn_fwd.kd", 1_090_000, 1_100_000),
]


def as_csv(dispatches=DISPATCHES) -> str:
    rows = (
        f'"KERNEL_DISPATCH","Agent 2",1,0,70,{i},{i},"{name}",{i},{start},{end},0\n'
        for i, (name, start, end) in enumerate(dispatches)
    )
    return HEAD + "".join(rows)


def as_json(dispatches=DISPATCHES) -> str:
    symbols = [
        {"kernel_id": i, "kernel_name": f"_Z{i}.kd", "formatted_kernel_name": name}
        for i, (name, *_) in enumerate(dispatches)
    ]
    records = [
        {
            "start_timestamp": start,
            "end_timestamp": end,
            "dispatch_info": {"kernel_id": i, "agent_id": {"handle": 2}, "queue_id": {"handle": 1}},
        }
        for i, (_, start, end) in enumerate(dispatches)
    ]
    tool = {"metadata": {}, "kernel_symbols": symbols, "buffer_records": {"kernel_dispatch": records}}
    return json.dumps({"rocprofiler-sdk-tool": [tool]})


@pytest.mark.parametrize("text", [as_csv(), as_json(), "\ufeff" + as_csv(DISPATCHES[::-1])], ids=["csv", "json", "bom"])
def test_kernels_go_through_the_same_analysis(tmp_path, text):
    path = tmp_path / "results"
    path.write_text(text, encoding="utf-8")
    analysis = analyse(read_rocprof(path), arch.unknown("gfx"))
    assert analysis.wall_ms == pytest.approx(0.1)
    assert {part.name: part.share for part in analysis.families} == pytest.approx(
        {MEMSET: 0.1, GEMM: 0.2, CONVOLUTION: 0.4, ATTENTION: 0.1, IDLE: 0.2}
    )
    sentences = [found.sentence for found in findings(analysis)]
    assert "naive_conv kernels take 40%: MIOpen has no tuned convolution for this shape" in sentences
    # rocprofv3 does not tell who launched: neither do we.
    assert "the GPU is idle 20% of the time: it waits for the host" in sentences


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "no such file"),
        ("Name,Start\n", "no column Kernel_Name, Start_Timestamp, End_Timestamp"),
        (HEAD, "no kernel ran"),
        (as_csv([("a", "", 5)]), "no whole timestamps"),
        (as_csv([("a", 9, 5)]), "ends before it starts"),
        ("{}", "not rocprofv3's JSON"),
        ('{"rocprofiler-sdk-tool": [{"kernel_symbols": []}]}', "not rocprofv3's JSON"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_what_to_type(tmp_path, text, why):
    path = tmp_path / "results.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnreadableTrace, match=why) as refused:
        read_rocprof(path)
    assert "rocprofv3 --kernel-trace" in refused.value.hint
