"""The router's page in a real browser: Debian's chromium, driven by selenium."""
