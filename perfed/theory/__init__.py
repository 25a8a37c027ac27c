"""The linear problems and algorithms of the papers' theorems."""
