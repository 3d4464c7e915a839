"""What the package costs, measured beside its peers on the simulated device."""
