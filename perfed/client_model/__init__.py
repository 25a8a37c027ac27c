"""The model of one client: facts about it, and a predictor, which is a network, an estimator or a mixture."""
