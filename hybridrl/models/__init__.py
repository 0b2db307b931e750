"""Models as folders in Hugging Face format: where they come from, and checks of their files.

- resolve.py: model.path -> folder (embedded model, SmolLM2 package, local path, hub)
- weight_files.py, vocabulary.py: checks from file headers and tokenizer.json, before a launch
- fingerprints.py: hashes by which a resume recognizes a changed model
- export_record.py: record of the files that `hybridrl export` wrote
- tiny/, tiny_moe/, tiny_hybrid/, tiny_vision/: the embedded models

Start with resolve.py. Nothing here builds a model in torch; that is distributed/weights.py.
"""
