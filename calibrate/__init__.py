"""Numbers in, numbers out: text windows, layer-wise replay, grids and the methods that choose codes and scales."""
