"""From a model, or from modules that are stages, to a StagedModel."""
