"""Model folders: hashes (`manifest`), tensors (`reader`), names (`families`), all of it (`load`).

Stands on `engine.config` and `engine.errors` alone and yields named tensors; `engine.runtime` puts
them into the model. Whatever is missing, damaged or left over in a folder is a `CheckpointError`
of one line that names the file and the reason.
"""
