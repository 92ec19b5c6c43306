"""Tasks of lm-evaluation-harness whose items are made here, so that no data set is downloaded."""
