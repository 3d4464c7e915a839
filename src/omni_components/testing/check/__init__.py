"""check_offload: one call that shows that a pipeline or split model can be offloaded, or says what is wrong."""

from .check import check_offload
from .records import CheckedComponent, CheckFinding, CheckReport, OffloadCheckError

__all__ = ["CheckFinding", "CheckReport", "CheckedComponent", "OffloadCheckError", "check_offload"]
