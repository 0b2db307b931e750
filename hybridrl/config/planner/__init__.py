"""Resource planner: predicted memory, FLOPs and the machine that they are compared with.

machine.py looks up nodes and GPUs; model_shape.py reads a model's sizes from its config.json.
memory.py predicts the memory of each phase of a step, from training_memory.py and activations.py;
memory_advice.py searches settings that fit. plan_text.py prints the plan of `run.dry=true`.
Checks that refuse a run are in config/checks/. Start with memory.py.
"""
