"""Every strategy against one process with the whole model: step for step, the same bits."""
