"""Makes kernels.wasm and fused.wasm, which browsers run, from kernels.wat, which people read.

    python -m porting.web.assemble           writes both
    python -m porting.web.assemble --text    prints kernels.wasm in WebAssembly's own text format

kernels.wat is written in that format, in folded form: an instruction stands in brackets with its
operands. To be short it has these forms more:

    $x  12                      as operands: (local.get $x), (i32.const 12)
    (set $x ...)  (tee $x ...)  (local.set $x ...), (local.tee $x ...)
    (each r 4 ...)              what it holds, for r = 0, 1, 2, 3; (each n (2 1) ...) for n = 2, 1
    (when {r == 0} ...)         what it holds, if that is true
    {16 * r}                    the value of a Python expression of such variables
    (madd $a $b $c)             $a + $b $c, which fused.wasm rounds once if the processor can: that
                                is "relaxed SIMD", which some browsers do not have yet
"""
import re
import struct
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.wat")
BINARIES = {SOURCE.with_name("kernels.wasm"): False, SOURCE.with_name("fused.wasm"): True}
TYPES = {"i32": 0x7F, "f32": 0x7D, "v128": 0x7B}
BLOCKS = {"block": 0x02, "loop": 0x03}
NAMED = {"br": 0x0C, "br_if": 0x0D, "call": 0x10, "local.get": 0x20, "local.set": 0x21,
         "local.tee": 0x22, **BLOCKS}        # their first word is the name of something
PLAIN = {"i32.lt_u": 0x49, "i32.add": 0x6A, "i32.sub": 0x6B, "i32.mul": 0x6C, "f32.max": 0x97,
         "f32.div": 0x95}
MEMORY = {"f32.store": b"\x38", "v128.load": b"\xfd\x00", "v128.load8x8_s": b"\xfd\x01",
          "v128.load32_splat": b"\xfd\x09", "v128.store": b"\xfd\x0b"}      # they take an offset
VECTOR = {
    "v128.const": 0x0C, "i8x16.shuffle": 0x0D, "f32x4.splat": 0x13, "f32x4.extract_lane": 0x1F,
    "f32x4.nearest": 0x6A, "i16x8.narrow_i32x4_s": 0x85, "i32x4.extend_low_i16x8_s": 0xA7,
    "i32x4.extend_high_i16x8_s": 0xA8, "i32x4.shl": 0xAB, "i32x4.add": 0xAE,
    "i32x4.dot_i16x8_s": 0xBA, "f32x4.abs": 0xE0, "f32x4.neg": 0xE1,
    "f32x4.add": 0xE4, "f32x4.sub": 0xE5, "f32x4.mul": 0xE6, "f32x4.div": 0xE7, "f32x4.min": 0xE8,
    "f32x4.max": 0xE9, "i32x4.trunc_sat_f32x4_s": 0xF8, "f32x4.convert_i32x4_s": 0xFA,
    "f32x4.relaxed_madd": 0x105,
}

# --- reading: a list for each pair of brackets, a str for each word


def read(text):
    """The first list of a text.

    >>> read("(f32.div (f32.const 1) $x)  ;; a comment")
    ['f32.div', ['f32.const', '1'], '$x']
    """
    stack = [[]]
    for word in re.findall(r'[()]|"[^"]*"|(?:\{[^}]*\}|[^\s(){}"])+', re.sub(r";;.*", "", text)):
        if word == "(":
            stack.append([])
        elif word == ")":
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(word)
    return stack[0][0]


def spell(node, known):
    """What a node of the short hand stands for, as a list of nodes. known: {variable: value}

    >>> spell(["each", "r", "2", ["set", "$s{r}", ["i32.add", "$s{r}", "{16 * r}"]]], {})[1]
    ['local.set', '$s1', ['i32.add', ['local.get', '$s1'], ['i32.const', '16']]]
    """
    if isinstance(node, str):
        return [re.sub(r"\{(.*?)\}", lambda found: str(eval(found[1], {}, known)), node)]
    if node[0] == "each":
        _, name, values, *body = node
        if isinstance(values, str):
            values = map(str, range(int(*spell(values, known))))
        values = [float(word) if "." in word else int(word)
                  for value in values for word in spell(value, known)]
        return [part for value in values for inner in body
                for part in spell(inner, known | {name: value})]
    if node[0] == "when":
        return [part for inner in node[2:] if spell(node[1], known) == ["True"]
                for part in spell(inner, known)]
    name, *parts = [part for inner in node for part in spell(inner, known)]
    if name == "madd":
        a, b, c = (operand(name, part) for part in parts)
        once, twice = ["f32x4.relaxed_madd", b, c, a], ["f32x4.add", a, ["f32x4.mul", b, c]]
        return [once if known["fused"] else twice]
    name = {"set": "local.set", "tee": "local.tee"}.get(name, name)
    if name in ("func", "param", "local"):
        return [[name, *parts]]
    names = parts[:1] if name in NAMED else []
    return [[name, *names, *(operand(name, part) for part in parts[len(names):])]]


def operand(name, part):
    if isinstance(part, str) and part.startswith("$"):
        return ["local.get", part]
    if isinstance(part, str) and part.isdigit() and name.startswith("i32.") and name != "i32.const":
        return ["i32.const", part]
    return part


def written(node, indent=""):
    """A node as text."""
    text = node if isinstance(node, str) else f"({' '.join(written(part) for part in node)})"
    if len(indent + text) <= 100 or isinstance(node, str):
        return indent + text
    first = next((i for i, part in enumerate(node) if isinstance(part, list)), len(node))
    inner = "".join("\n" + written(part, indent + "  ") for part in node[first:])
    return f"{indent}({' '.join(node[:first])}{inner})"


# --- bytes


def unsigned(n):
    """LEB128: seven bits per byte, the lowest first. The top bit means that more follow.

    >>> unsigned(300).hex()
    'ac02'
    """
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + unsigned(n >> 7)


def signed(n):
    """The same with a sign, which is bit 6 of the last byte."""
    return bytes([n & 127]) if -64 <= n < 64 else bytes([n & 127 | 128]) + signed(n >> 7)


def listed(items):
    return unsigned(len(items)) + b"".join(items)


def named(word):
    return listed([bytes([byte]) for byte in word.strip('"').encode()])


class Function:
    """(func $name (export "name") (param $a i32) (result f32) (local $b v128) instruction ...)"""

    def __init__(self, source, functions):
        self.functions = functions      # {name: number}
        self.labels = []                # of the blocks around an instruction, the innermost last
        heads = {"export": [], "param": [], "result": [], "local": []}
        self.body = []
        for part in source[1:]:
            if isinstance(part, list):
                heads.get(part[0], self.body).append(part)
        self.export = [name for _, name in heads["export"]]
        variables = [name for _, name, _ in heads["param"] + heads["local"]]
        self.variables = {name: number for number, name in enumerate(variables)}
        self.locals = [bytes([1, TYPES[kind]]) for *_, kind in heads["local"]]
        params, results = ([bytes([TYPES[part[-1]]]) for part in heads[key]]
                           for key in ("param", "result"))
        self.type = b"\x60" + listed(params) + listed(results)

    def binary(self):
        code = listed(self.locals) + self.all(self.body) + b"\x0b"
        return unsigned(len(code)) + code

    def all(self, instructions):
        return b"".join(map(self.one, instructions))

    def one(self, instruction):
        """Operands first, then the instruction itself; a block holds others and ends with 0x0b."""
        name, *rest = instruction
        words = [word for word in rest if isinstance(word, str)]
        inner = [part for part in rest if not isinstance(part, str)]
        if name in BLOCKS:
            self.labels.append(words[0])
            code = self.all(inner)
            self.labels.pop()
            return bytes([BLOCKS[name], 0x40]) + code + b"\x0b"
        return self.all(inner) + self.opcode(name, words)

    def opcode(self, name, words):
        if name in ("br", "br_if"):         # how many blocks it leaves
            return bytes([NAMED[name]]) + unsigned(self.labels[::-1].index(words[0]))
        if name in NAMED:
            numbers = self.functions if name == "call" else self.variables
            return bytes([NAMED[name]]) + unsigned(numbers[words[0]])
        if name == "i32.const":
            return b"\x41" + signed(int(words[0]))
        if name == "f32.const":
            return b"\x43" + struct.pack("<f", float(words[0]))
        if name in PLAIN:
            return bytes([PLAIN[name]])
        if name in MEMORY:                  # the 0: it may begin at any address
            offset = int(words[0].removeprefix("offset=")) if words else 0
            return MEMORY[name] + b"\0" + unsigned(offset)
        lanes = list(map(int, words[name == "v128.const":]))
        packed = struct.pack("<4i", *lanes) if name == "v128.const" else bytes(lanes)
        return b"\xfd" + unsigned(VECTOR[name]) + packed


def assemble(text, fused):
    """The bytes of a module."""
    (_, memory, *sources), = spell(read(text), {"fused": fused})
    _, (_, where, what), least = memory
    functions = {source[1]: number for number, source in enumerate(sources)
                 if isinstance(source[1], str)}
    made = [Function(source, functions) for source in sources]
    sections = {
        1: [f.type for f in made],
        2: [named(where) + named(what) + b"\x02\0" + unsigned(int(least))],
        3: [unsigned(number) for number in range(len(made))],
        7: [named(name) + b"\0" + unsigned(number)
            for number, f in enumerate(made) for name in f.export],
        10: [f.binary() for f in made],
    }
    code = b"\0asm\x01\0\0\0"
    for number, items in sections.items():
        content = listed(items)
        code += bytes([number]) + unsigned(len(content)) + content
    return code


def main():
    text = SOURCE.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--text"]:
        module, = spell(read(text), {"fused": False})
        return print(written(module))
    for path, fused in BINARIES.items():
        path.write_bytes(assemble(text, fused))
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
