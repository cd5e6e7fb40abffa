"""The pages of the dashboard: one module each, with a `build(source, theme, arguments)`."""
