"""Numbers that anyone can trust and repeat: workloads, engines side by side, profiles, reports, projections."""
