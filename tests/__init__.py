"""jattn's tests, in folders by what they test; `support` is shared by them."""
