"""Numbers that a stranger can trust and repeat: workloads, engines side by side, profiles, reports, projections."""
