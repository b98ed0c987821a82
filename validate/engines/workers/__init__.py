"""Scripts that run in the engines' interpreters, not in ours: see worker.py."""
