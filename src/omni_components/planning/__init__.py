"""What offload would cost, before any weight is read: components, conflicts, peaks, traffic, and what fits."""
