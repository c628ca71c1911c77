"""Measurements, one command each: `python -m benchmarks.NAME [--json FILE]`. Results with machine and date: results/."""
