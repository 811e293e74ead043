"""How fast orch is, beside plain tools in the same run: ``python -m benchmarks`` (or ``make bench``)."""
