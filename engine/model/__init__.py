"""The transformer: layers, attention over a paged cache, the Mixture-of-Experts layer, sampling."""
