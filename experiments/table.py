from pathlib import Path
from .runner import Context
def write(context: Context, out: Path) -> None:
    (out / "replication.md").write_text("")
