"""What people read of the queue: explanations, forecasts, listings. Nothing here writes."""
