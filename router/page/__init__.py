"""The router over HTTP, for people and for Prometheus. Read-only."""
