"""What recipes share: tasks and their rewards, evaluation, export of models. No maths of a step, no hooks on a loop."""
