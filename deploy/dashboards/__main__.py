"""Writes the dashboards, or with --check says whether they are as they would be written."""

from __future__ import annotations

import sys

from deploy.dashboards import FOLDER, files


def main() -> int:
    """Returns the exit code: 1 when --check has found a difference."""
    if "--check" in sys.argv[1:]:
        stale = [path for path, text in files().items() if path.read_text(encoding="utf-8") != text]
        sys.stderr.writelines(f"{path} is not up to date; run python -m deploy.dashboards\n" for path in stale)
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
