"""Tables and figures from scripts/results, for plot_bench."""
