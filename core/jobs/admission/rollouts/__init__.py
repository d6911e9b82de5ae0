"""What stages that learn from sampled answers are admitted with: trials of their rewards, and reward models."""
