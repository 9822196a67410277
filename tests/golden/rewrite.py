"""Writes the golden frames anew: `python tests/golden/rewrite.py`.

Reads the tensors and cases of `frames.json`, encodes each with the code of this tree, and puts the
frame and its decoded floats back into the file. Says which have changed; a change is a change of
the wire format, so look at the difference before you commit it, and give it a line in the
changelog. To add a case, add its name, spec, key, dtype and steps to the file and run this.
"""

from __future__ import annotations

import json

from test_golden_frames import FRAMES, decoded, encoded, read


def main() -> None:
    document = json.loads(FRAMES.read_text(encoding="utf-8"))
    for entry, case in zip(document["cases"], read(document), strict=True):
        frame = encoded(case)
        if frame != case.frame:
            print(f"{case.name}: {'new' if not case.frame else 'changed'}, {len(frame)} bytes")
        entry["frame"], entry["decoded"] = frame.hex(), decoded(frame).hex()
    FRAMES.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
