"""What can be wrong with the simulated accelerator itself."""

from ...errors import OmniComponentsError


class SimulatedAcceleratorUnavailable(OmniComponentsError, RuntimeError):
    """The simulated accelerator cannot be built or loaded here.

    Attributes:
        reason: what is missing, and what to install.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the simulated accelerator is not available: {self.reason}"
