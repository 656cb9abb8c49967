"""From a plan to a program: the solo step, the strategies folded over it, the passes, the proof."""
