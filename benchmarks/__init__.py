"""Measurements, one command each: `python -m benchmarks.NAME [--json FILE]`. Results are in results/."""
