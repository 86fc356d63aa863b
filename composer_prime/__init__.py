"""composer-prime: the method and its vocabulary. No process loop lives here."""
