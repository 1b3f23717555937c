"""Studies: tuned, paired and planned before they are run; see `siamesenorm study`."""
