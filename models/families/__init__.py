"""One short file a family: its data as ``FAMILY``. A new file here is a new family; nothing else lists them."""
