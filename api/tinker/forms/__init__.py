"""What Tinker's SDK sends and reads: JSON and protocol buffers."""
