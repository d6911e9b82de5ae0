"""Parts of the evaluation axis: metrics of generated answers."""
