from tests.helpers.fixtures import sim

__all__ = ["sim"]
