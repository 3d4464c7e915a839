"""From files straight into masters: no second copy, and the device is never touched."""
