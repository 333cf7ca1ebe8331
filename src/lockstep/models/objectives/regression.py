"""One or more numbers for each sample."""

METRICS = ("mae", "rmse", "r2")
