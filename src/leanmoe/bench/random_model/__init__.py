"""Models of public shapes with random weights: `shapes`, the `networks` they name, and the `weights` in them."""
