"""One scorer for the reference, for an artifact's expansion and for the arithmetic of the engine that serves it."""
