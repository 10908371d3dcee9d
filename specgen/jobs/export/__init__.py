"""The rows of a run in other formats."""

from specgen.jobs.export.openai import export_openai
from specgen.jobs.export.parquet import export_parquet

__all__ = ["export_openai", "export_parquet"]
