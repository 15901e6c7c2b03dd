"""An epoch, a file a stage: the method that the settings name, its cost, rollout, scores, update, evaluation."""
