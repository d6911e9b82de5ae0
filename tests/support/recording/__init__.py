"""A recording of the first minute for the README: real commands on a real terminal, drawn as an animated SVG."""
