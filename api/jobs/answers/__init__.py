"""What the model of a job answered: samples at evaluations, rollouts of training."""
