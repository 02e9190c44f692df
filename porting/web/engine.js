/* A port of the library to plain JavaScript, without packages: the ten steps of porting/README.md,
   in their order, then trees, the tokenizer, the kernels and the program. It runs in browsers and
   under node, and computes what takes the most time in WebAssembly if it gets kernels.wasm:

       python porting/check.py node porting/web/engine.js
       python porting/check.py node porting/web/engine.js porting/web/kernels.wasm

   A tensor of a model is {shape, data}. What flows through the model is a flat Float32Array with a
   row for each token. The sums of these loops run in float64, because every number in JavaScript is
   a float64; those of the kernels run in float32. */
"use strict";

let kernels = null;     // see makeKernels
const floats = count => kernels ? kernels.floats(count) : new Float32Array(count);
function sum(numbers) {
  let all = 0;
  for (let i = 0; i < numbers.length; i++) all += numbers[i];
  return all;
}
const range = (count, first = 0) => Array.from({ length: count }, (_, i) => first + i);

// --- 1. Safetensors

// {name: tensor} of a file: eight bytes with the length of the JSON, the JSON, the numbers. Typed
// arrays have the byte order of the machine: little-endian on every one that runs a browser.
function readTensors(buffer) {
  const start = 8 + headerLength(buffer);
  const tensors = {};
  for (const [name, dtype, shape, first, last] of readHeader(buffer.slice(8, start)))
    tensors[name] = { shape, data: numbersOf(dtype, buffer.slice(start + first, start + last)) };
  // int8 by row: row n of a matrix is its whole numbers times number n of the tensor `scale`
  for (const name of Object.keys(tensors).filter(name => name + ".scale" in tensors)) {
    tensors[name].scale = tensors[name + ".scale"].data;
    delete tensors[name + ".scale"];
  }
  return tensors;
}

const headerLength = buffer => Number(new DataView(buffer).getBigUint64(0, true));

function readHeader(bytes) {
  const { __metadata__, ...header } = JSON.parse(new TextDecoder().decode(bytes));
  return Object.entries(header).map(([name, { dtype, shape, data_offsets: [first, last] }]) =>
    [name, dtype, shape, first, last]);
}

function numbersOf(dtype, bytes) {
  if (dtype === "F32") return new Float32Array(bytes);
  if (dtype === "I8") return new Int8Array(bytes);
  if (dtype !== "BF16") throw new Error(`weights of type ${dtype}: convert them to F32 or BF16`);
  const wide = new Uint32Array(new Uint16Array(bytes));
  for (let i = 0; i < wide.length; i++) wide[i] <<= 16;     // BF16 is the upper half of a float32
  return new Float32Array(wide.buffer);
}

function fingerprint({ shape, data }) {
  const at = range(5).map(i => Math.floor(i * (data.length - 1) / 4));
  return { shape, sum: sum(data), magnitudes: sum(new Float64Array(data).map(Math.abs)),
           values: at.map(i => data[i]) };
}

// The weights, and what config.json says about them.
function makeModel(config, tensors) {
  const gemma = config.model_type === "gemma2";
  const scaling = config.rope_scaling ?? null;
  if (!gemma && config.model_type !== "llama") throw new Error(`no family ${config.model_type}`);
  if (config.attention_bias || config.mlp_bias) throw new Error("biases would be left out");
  if (scaling && !["linear", "llama3"].includes(scaling.rope_type))
    throw new Error(`no rope_type ${scaling.rope_type}`);
  const D = config.head_dim ?? config.hidden_size / config.num_attention_heads;
  return {
    ...weightsOf(tensors, config.num_hidden_layers), gemma, D,
    V: config.vocab_size, L: config.num_hidden_layers,
    H: config.num_attention_heads, Hkv: config.num_key_value_heads,
    context: config.max_position_embeddings, eps: config.rms_norm_eps,
    freqs: frequencies(D, config.rope_theta, scaling),
    offset: gemma ? 1 : 0, embedScale: gemma ? Math.sqrt(config.hidden_size) : 1,
    scale: (gemma ? config.query_pre_attn_scalar : D) ** -0.5,
    cap: config.attn_logit_softcapping ?? null,
    lastCap: config.final_logit_softcapping ?? null,
    window: gemma ? config.sliding_window : null, eos: [config.eos_token_id ?? []].flat(),
  };
}

// The tensors; and by the last part of their names those that each block uses.
function weightsOf(tensors, L) {
  if (kernels) Object.values(tensors).forEach(kernels.pack);
  const blocks = range(L).map(() => ({}));
  for (const [name, tensor] of Object.entries(tensors)) {
    const [, block, part] = name.match(/^model\.layers\.(\d+)\..*?(\w+)\.weight$/) ?? [];
    if (part) blocks[block][part] = tensor;
  }
  const embedding = tensors["model.embed_tokens.weight"];
  return { tensors, blocks, embedding, head: tensors["lm_head.weight"] ?? embedding,
           lastNorm: tensors["model.norm.weight"] };
}

// The model's int8 copy, which only drafts. With kernels it also rounds what its matrices multiply.
function inInt8(m) {
  const tensors = Object.fromEntries(Object.entries(m.tensors).map(([name, tensor]) =>
    [name, tensor.shape.length === 2 ? { ...quantised(tensor), rounds: true } : tensor]));
  return { ...m, ...weightsOf(tensors, m.L), embedding: m.embedding };
}

// Row n of a matrix becomes whole numbers from -127 to 127, times number n of `scale`.
function quantised({ shape, data, scale, wide, packed }) {
  if (scale) return { shape, data, scale, packed: wide ? undefined : packed };
  const [rows, width] = shape;
  const codes = new Int8Array(rows * width);
  scale = new Float32Array(rows);
  for (let n = 0; n < rows; n++) scale[n] = roundRow(data, n * width, width, codes);
  return { shape, data: codes, scale };
}

// Returns the scale. Of two whole numbers that are equally near, the even one is taken.
function roundRow(x, first, count, to) {
  let most = 0;
  for (let i = first; i < first + count; i++) most = Math.max(most, Math.abs(x[i]));
  const scale = Math.fround(most / 127);
  for (let i = first; i < first + count && scale > 0; i++) {
    const exact = Math.fround(x[i] / scale);
    const near = Math.round(exact);
    to[i] = near - exact === 0.5 && near % 2 !== 0 ? near - 1 : near;
  }
  return scale;
}

// y[t][o] = sum over i of W[o][i] x[t][i], for each token t. Every sum is its own, over rising i, so
// a token's numbers are the same to the bit, however many tokens are read together.
function product(matrix, x) {
  if (matrix.packed) return kernels.product(matrix, x);
  const { shape: [rows, width], data: w, scale } = matrix;
  const y = new Float32Array(x.length / width * rows);
  for (let i = 0; i < y.length; i++) {
    const o = i % rows;
    y[i] = dot(w, o * width, x, (i - o) / rows * width, width) * (scale ? scale[o] : 1);
  }
  return y;
}

function dot(a, i, b, j, count) {
  let all = 0;
  for (let k = 0; k < count; k++) all += a[i + k] * b[j + k];
  return all;
}

// --- 2. Norm

function norm(x, weight, eps, offset) {
  const width = weight.length;
  const y = floats(x.length);
  for (let row = 0; row < x.length; row += width) {
    const size = Math.sqrt(dot(x, row, x, row, width) / width + eps);
    for (let j = 0; j < width; j++) y[row + j] = x[row + j] / size * (offset + weight[j]);
  }
  return y;
}

// --- 3. Rope

function frequencies(headDim, theta, scaling) {
  return range(headDim / 2).map(i => {
    const freq = theta ** (-2 * i / headDim);
    if (scaling === null) return freq;
    if (scaling.rope_type === "linear") return freq / scaling.factor;
    const { low_freq_factor: low, high_freq_factor: high } = scaling;
    const turns = scaling.original_max_position_embeddings * freq / (2 * Math.PI);
    const keep = Math.min(1, Math.max(0, (turns - low) / (high - low)));
    return keep * freq + (1 - keep) * freq / scaling.factor;
  });
}

// Cosine and sine of every angle, (T, D / 2), by which a token's position turns its heads.
function turns(positions, freqs) {
  const angles = positions.flatMap(position => freqs.map(freq => position * freq));
  return { half: freqs.length, cos: angles.map(Math.cos), sin: angles.map(Math.sin) };
}

// x (T, heads, D): turn every head of each token.
function rotate(x, { half, cos, sin }) {
  const y = floats(x.length);
  const width = half * x.length / cos.length;
  for (let head = 0; head < x.length; head += 2 * half) {
    const angle = Math.floor(head / width) * half;
    for (let i = 0; i < half; i++) {
      const one = x[head + i];
      const other = x[head + half + i];
      y[head + i] = one * cos[angle + i] - other * sin[angle + i];
      y[head + half + i] = other * cos[angle + i] + one * sin[angle + i];
    }
  }
  return y;
}

// --- 4. Mask and attention

// mask[i][s]: does token i of the block see slot s? tree[i][j]: does it see token j of the block? A
// chain has no tree: each token sees those before it and itself.
function visible(positions, slots, end, tree, window) {
  return positions.map((own, i) => range(end).map(s => {
    const j = s - slots[0];             // below 0 it is an older token, whose slot is its position
    const position = j < 0 ? s : positions[j];
    const seen = j < 0 || (tree ? tree[i][j] === 1 : j <= i);
    return Number(seen && (window === null || own - position < window));
  }));
}

const softcap = (x, cap) => cap === null ? x : cap * Math.tanh(x / cap);

// q (T, H, D); keys and values: for each of the Hkv key heads (slots, D) -> (T, H, D)
function attend(q, keys, values, mask, { H, Hkv, D, scale, cap }) {
  const y = new Float32Array(q.length);
  mask.forEach((seen, t) => {
    const slots = range(seen.length).filter(s => seen[s]);
    for (let h = 0; h < H; h++) {
      const own = (t * H + h) * D;
      const k = keys[Math.floor(h / (H / Hkv))];
      const v = values[Math.floor(h / (H / Hkv))];
      const weights = softmax(slots.map(s => softcap(scale * dot(q, own, k, s * D, D), cap)));
      const mixed = new Float64Array(D);
      slots.forEach((s, i) => {
        const weight = weights[i];
        for (let d = 0; d < D; d++) mixed[d] += weight * v[s * D + d];
      });
      y.set(mixed, own);
    }
  });
  return y;
}

function softmax(x, temperature = 1) {
  const most = x[argmax(x)];            // trap: without it, exp overflows
  const p = new Float64Array(x.length);
  for (let i = 0; i < p.length; i++) p[i] = Math.exp((x[i] - most) / temperature);
  const all = sum(p);
  for (let i = 0; i < p.length; i++) p[i] /= all;
  return p;
}

// --- 5. Sub-layer

// at: {positions, slots, tree, turns} of a block's tokens. The block writes to the cache before it reads.
function attention(m, block, x, at, cache) {
  const W = m.blocks[block];
  const { keys, values } = cache[block];
  const q = rotate(product(W.q_proj, x), at.turns);
  store(keys, rotate(product(W.k_proj, x), at.turns), at.slots, m.D);
  store(values, product(W.v_proj, x), at.slots, m.D);
  if (kernels && !at.tree && !m.gemma && m.D % 16 === 0)
    return product(W.o_proj, kernels.attend(q, keys, values, at.slots, m));
  const window = block % 2 === 0 ? m.window : null;
  const mask = visible(at.positions, at.slots, at.slots.at(-1) + 1, at.tree, window);
  return product(W.o_proj, attend(q, keys, values, mask, m));
}

// Write new keys or values, (T, Hkv, D), to their slots in each key head's part of the cache.
function store(heads, x, slots, D) {
  slots.forEach((slot, t) => heads.forEach((head, g) => {
    const from = (t * heads.length + g) * D;
    head.set(x.subarray(from, from + D), slot * D);
  }));
}

const silu = z => z / (1 + Math.exp(-z));
const gelu = z => z / 2 * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (z + 0.044715 * z ** 3)));

function mlp(m, block, x) {
  const W = m.blocks[block];
  const gate = product(W.gate_proj, x);
  const up = product(W.up_proj, x);
  if (kernels && !m.gemma && gate.length % 4 === 0)
    return product(W.down_proj, kernels.gate(gate, up));
  const act = gate.map(m.gemma ? gelu : silu);
  return product(W.down_proj, act.map((value, i) => value * up[i]));
}

// x + f_i(x): 2 * block is an attention, 2 * block + 1 an MLP.
function sublayer(m, i, x, at, cache) {
  const block = Math.floor(i / 2);
  const isMlp = i % 2 === 1;
  const layernorm = (name, x) =>
    norm(x, m.blocks[block][name + "_layernorm"].data, m.eps, m.offset);
  const before = isMlp ? (m.gemma ? "pre_feedforward" : "post_attention") : "input";
  let y = layernorm(before, x);
  y = isMlp ? mlp(m, block, y) : attention(m, block, y, at, cache);
  if (m.gemma) y = layernorm(isMlp ? "post_feedforward" : "post_attention", y);
  const sums = floats(x.length);
  for (let j = 0; j < x.length; j++) sums[j] = x[j] + y[j];
  return sums;
}

// --- 6. Forward

function embed(m, tokens) {
  const { shape: [, width], data, scale } = m.embedding;
  const x = floats(tokens.length * width);
  tokens.forEach((token, t) => {
    const factor = m.embedScale * (scale ? scale[token] : 1);
    for (let j = 0; j < width; j++) x[t * width + j] = factor * data[token * width + j];
  });
  return x;
}

// x after some sub-layers, for each token of a block; `trace` receives x before the first sub-layer
// and after each.
function states(m, tokens, at, cache, sublayers = null, trace = []) {
  at.turns = turns(at.positions, m.freqs);
  let x = embed(m, tokens);
  trace.push(x);
  for (const i of sublayers ?? range(2 * m.L)) {
    x = sublayer(m, i, x, at, cache);
    trace.push(x);
  }
  return x;
}

// Run the model, or some of its sub-layers, over a block. Returns the logits (V) after each token.
function run(m, tokens, at, cache, sublayers = null, trace = []) {
  const x = states(m, tokens, at, cache, sublayers, trace);
  const normed = norm(x, m.lastNorm.data, m.eps, m.offset);
  const logits = product(m.head, normed).slice();
  if (m.lastCap !== null) logits.forEach((x, i) => { logits[i] = softcap(x, m.lastCap); });
  return tokens.map((_, t) => logits.subarray(t * m.V, (t + 1) * m.V));
}

// Fill the cache with a prompt, some tokens at a time.
function read(m, tokens, cache) {
  for (let first = 0; first < tokens.length; first += 32) {
    const block = tokens.slice(first, first + 32);
    states(m, block, span(first, block.length), cache);
  }
}

// --- 7. Cache

// It has no length: slot = position, and what lies after a token is hidden from it. So rolling back
// is starting the next block earlier, and a cache that another text has left needs no cleaning.
function makeCache(m) {
  const slots = kernels ? kernels.keep : count => new Float32Array(count);
  const heads = () => range(m.Hkv).map(() => slots((m.context + 4) * m.D));
  return range(m.L).map(() => ({ keys: heads(), values: heads() }));
}

// Where the tokens of a block stand that begins at slot `first`.
function span(first, T) {
  return { positions: range(T, first), slots: range(T, first), tree: null };
}

// --- 8. Coins and sampling

const wrap = z => BigInt.asUintN(64, z);

// The 53 bits of number i in the stream of a seed.
function bits(seed, i) {
  let z = wrap(BigInt(seed) + (BigInt(i) + 1n) * 0x9E3779B97F4A7C15n);
  z = wrap((z ^ (z >> 30n)) * 0xBF58476D1CE4E5B9n);
  z = wrap((z ^ (z >> 27n)) * 0x94D049BB133111EBn);
  return Number((z ^ (z >> 31n)) >> 11n);
}

const uniform = (seed, i) => bits(seed, i) * 2 ** -53;
// The uniforms of a seed, spent one after the other.
function makeCoins(seed) {
  let i = 0;
  const next = () => uniform(seed, i++);
  return { next, take: count => range(count).map(next) };
}

const oneHot = (token, V) => new Float64Array(V).fill(1, token, token + 1);
function argmax(x) {
  let best = 0;
  for (let i = 1; i < x.length; i++) if (x[i] > x[best]) best = i;        // of equals the first
  return best;
}

function toProbs(logits, { temperature, top_k, top_p, min_p }) {
  if (temperature === 0) return oneHot(argmax(logits), logits.length);
  if (top_k === null && top_p === null && min_p === null) return softmax(logits, temperature);
  let order = range(logits.length);
  order.sort((a, b) => logits[b] - logits[a] || a - b);     // of equal logits the lower id is first
  order = order.slice(0, top_k ?? logits.length);
  const kept = softmax(order.map(t => logits[t]), temperature);
  let before = 0;
  const stays = kept.map(chance => {
    const inside = top_p === null || top_p === 1 || before < top_p;
    before += chance;
    return inside && (min_p === null || chance >= min_p * kept[0]);
  });
  const all = sum(kept.filter((_, i) => stays[i]));
  const p = new Float64Array(logits.length);
  order.forEach((t, i) => { p[t] = stays[i] ? kept[i] / all : 0; });
  return p;
}

// The first token at which the running sum is greater than u times the whole sum.
function choose(weights, u) {
  const edge = u * sum(weights);
  let running = 0;
  for (let i = 0; i < weights.length; i++) if ((running += weights[i]) > edge) return i;
  return -1;
}

const firstFalse = passed => [...passed, false].indexOf(false);

// What is left of p once the draft's share is taken away.
function residual(p, q) {
  const rest = p.slice();
  for (let t = 0; t < rest.length; t++) rest[t] = Math.max(rest[t] - q[t], 0);
  return rest;
}

// p: K+1 rows, q: K rows. A token passes with probability min(1, p / q). After the first that does
// not, the next one is drawn from the residual; after a whole draft there is no q: from p itself.
// path: the nodes of the text, 0 for the last known token and k + 1 for drafted token k.
function verify(p, q, draft, flips, coin) {
  const ratio = draft.map((token, k) => p[k][token] / q[k][token]);
  const accepted = firstFalse(ratio.map((chance, k) => flips[k] < chance));
  const rest = accepted < draft.length ? residual(p[accepted], q[accepted]) : p[accepted];
  const token = choose(sum(rest) > 0 ? rest : p[accepted], coin);
  return { accepted, path: range(accepted + 1), token, ratio };
}

// --- 9. Round

// What followed the last earlier occurrence of the text's final n tokens.
function lookup(text, n, most) {
  const tail = text.slice(-n).join();
  for (let i = text.length - n - 1; i >= 0; i--)
    if (text.slice(i, i + n).join() === tail) return text.slice(i + n, i + n + most);
  return [];
}

// A draft for each text. Returns {draft, q, parents} of each and the uniforms spent. The parent of
// a token in a chain is the token before it; 0 is the last known one.
function propose(m, r, texts, left, caches, coins) {
  const { kind, gamma = 0, n, sublayers, widths, int8 } = r.drafter;
  const most = left.map(more => Math.max(0, Math.min(gamma, more - 1)));
  const drafts = texts.map(() => ({ draft: [], q: [], logits: [] }));
  const spent = [];
  if (kind === "ngram") drafts.forEach((d, b) => {
    d.draft = lookup(texts[b], n, most[b]);
    d.q = d.draft.map(token => oneHot(token, m.V));
  });
  if (kind === "sublayers") for (let k = 0; k < Math.max(...most); k++) drafts.forEach((d, b) => {
    const u = coins.next();                             // spent also by a text that drafts fewer
    spent.push(u);
    if (k >= most[b]) return;
    const known = texts[b];
    const at = span(known.length - 1 + k, 1);
    const drafts = int8 ? m.int8 : m;
    const [logits] = run(drafts, [d.draft.at(-1) ?? known.at(-1)], at, caches[b], sublayers);
    d.logits.push(logits);
    d.q.push(toProbs(logits, r.sampling));
    d.draft.push(choose(d.q[k], u));
  });
  drafts.forEach((d, b) => {
    d.parents = range(d.draft.length);
    if (r.trees) spent.push(...addSiblings(d, widths, left[b] - 1, coins));
  });
  return { drafts, spent };
}

// The whole model reads the last known token and the draft, in one pass, and checks the draft.
function oneText(m, r, text, cache, { draft, q, parents }, flips, coin) {
  const first = text.length - 1;
  const block = [text.at(-1), ...draft];
  const at = r.trees ? branches(first, parents) : span(first, block.length);
  const p = run(m, block, at, cache).map(logits => toProbs(logits, r.sampling));
  const check = r.trees ? verifyTree : verify;
  const { path, token, ratio } = check(p, q, draft, flips, coin, parents);
  if (r.trees) keep(m, cache, first, path);
  const fresh = upToEnd([...path.slice(1).map(node => block[node]), token], r.eos);
  text.push(...fresh);
  return {
    positions: at.positions, block, draft, parents, ratio, token, new: fresh,
    p: draft.map((token, k) => p[parents[k]][token]), q: draft.map((token, k) => q[k][token]),
    accepted: Math.min(path.length - 1, fresh.length), rows: { p, q },
  };
}

// New tokens, up to the first that ends the text.
function upToEnd(fresh, eos) {
  const end = fresh.findIndex(token => eos.includes(token));
  return end < 0 ? fresh : fresh.slice(0, end + 1);
}

// Yields what happened in each round. `rows` are the whole distributions, for a page to show.
function* rounds(m, r) {
  const texts = r.prompts.map(prompt => [...prompt]);
  const caches = r.caches ?? texts.map(() => makeCache(m));
  const left = texts.map(text => Math.min(r.max_new, m.context - text.length));
  const coins = makeCoins(r.seed);
  texts.forEach((text, b) => read(m, text, caches[b]));
  for (let round = 0; Math.max(...left) > 0; round++) {
    const { drafts, spent } = propose(m, r, texts, left, caches, coins);
    const longest = Math.max(...drafts.map(d => d.draft.length));
    const flips = texts.map(() => coins.take(longest));
    const last = coins.take(texts.length);
    const line = { round, u_draft: spent, u_flip: flips.flat(), u_next: last };
    const found = texts.map((text, b) =>
      left[b] > 0 ? oneText(m, r, text, caches[b], drafts[b], flips[b], last[b]) : null);
    for (const key in found.find(row => row)) line[key] = found.map(row => row && row[key]);
    found.forEach((row, b) => {
      if (row) left[b] = r.eos.includes(row.new.at(-1)) ? 0 : left[b] - row.new.length;
    });
    yield line;
  }
}

// --- 10. Race

// The token after `position`: the first to arrive, where token v takes e / p_v.
function race(p, seed, position) {
  const noise = v => -Math.log1p(-uniform(seed, (position + 1) * p.length + v));
  return argmax(p.map((chance, v) => chance > 0 ? -noise(v) / chance : -Infinity));
}

// All rounds of one text. What is drafted changes how many passes it takes, never a token of it.
function raceText(m, r, prompt, seed) {
  const { kind, gamma = 0, n, sublayers } = r.drafter;
  const text = [...prompt];
  const [cache] = r.caches ?? [makeCache(m)];
  const found = [];
  let left = Math.min(r.max_new, m.context - text.length);
  const winner = (logits, position) => race(toProbs(logits, r.sampling), seed, position);
  read(m, text, cache);
  while (left > 0) {
    const first = text.length - 1;
    const most = Math.max(0, Math.min(gamma, left - 1));
    const draft = kind === "ngram" ? lookup(text, n, most) : [];
    while (kind === "sublayers" && draft.length < most) {
      const at = first + draft.length;
      const [logits] = run(m, [draft.at(-1) ?? text.at(-1)], span(at, 1), cache, sublayers);
      draft.push(winner(logits, at));
    }
    const block = [text.at(-1), ...draft];
    const winners = run(m, block, span(first, block.length), cache)
      .map((logits, k) => winner(logits, first + k));
    const accepted = firstFalse(draft.map((token, k) => token === winners[k]));
    const fresh = upToEnd(winners.slice(0, accepted + 1), r.eos);
    text.push(...fresh);
    left = r.eos.includes(fresh.at(-1)) ? 0 : left - fresh.length;
    found.push({ draft, accepted: Math.min(accepted, fresh.length), new: fresh });
  }
  return found;
}

// --- Trees: siblings share a position, but not a slot

// tree[i][j]: does node i see node j, itself or an ancestor? Node 0 is the last known token.
function ancestors(parents) {
  const tree = [oneHot(0, parents.length + 1)];
  parents.forEach((parent, k) => tree.push(tree[parent].with(k + 1, 1)));
  return tree;
}

function branches(first, parents) {
  const tree = ancestors(parents);
  const positions = tree.map(row => first + sum(row) - 1);
  return { positions, slots: range(tree.length, first), tree };
}

// Move the accepted nodes to the slots first, first + 1, ...
function keep({ D }, cache, first, path) {
  for (const head of cache.flatMap(({ keys, values }) => [...keys, ...values]))
    path.forEach((node, i) =>
      head.copyWithin((first + i) * D, (first + node) * D, (first + node + 1) * D));
}

// p: a row for each node, q: a row for each drafted token. What a node's rejected children leave of
// its p takes the place of p for the next child, and for the token after the path.
function verifyTree(p, q, draft, flips, coin, parents) {
  const rest = [...p];
  const ratio = [];
  const path = [0];
  draft.forEach((token, k) => {
    const left = rest[parents[k]];
    ratio.push(left[token] / q[k][token]);
    const less = residual(left, q[k]);
    const mass = sum(less);
    if (mass > 0) rest[parents[k]] = less.map(x => x / mass);
  });
  draft.forEach((_, k) => {
    if (parents[k] === path.at(-1) && flips[k] < ratio[k]) path.push(k + 1);
  });
  return { path, token: choose(rest[path.at(-1)], coin), ratio };
}

// Add siblings of the first tokens of a chain. Each is drawn from what is left of q; if nothing is
// left, it is the likeliest unused token. Returns the uniforms spent.
function addSiblings({ draft, q, logits, parents }, widths, room, coins) {
  const left = q.map(row => row.slice());
  const open = logits.map(row => row.slice());
  const latest = [...draft];
  const spent = [];
  for (const k of widths.flatMap(width => range(Math.min(width, left.length)))) {
    if (draft.length >= room) break;
    left[k][latest[k]] = 0;
    open[k][latest[k]] = -Infinity;
    const mass = sum(left[k]);
    const drawn = mass > 0 ? left[k].map(x => x / mass) : oneHot(argmax(open[k]), left[k].length);
    spent.push(coins.next());
    latest[k] = choose(drawn, spent.at(-1));
    draft.push(latest[k]);
    q.push(drawn);
    parents.push(k);
  }
  return spent;
}

// --- The tokenizer: byte-level BPE, from tokenizer.json

// Every byte has a printable character: itself, or one from 256 on.
function byteCharacters() {
  const printable = b => b >= 33 && b <= 126 || b >= 161 && b <= 172 || b >= 174;
  let others = 256;
  return range(256).map(b => String.fromCharCode(printable(b) ? b : others++));
}

// Numbers, of which `pop` gives the least: a heap, in which none is less than the one at half its
// place.
function makeQueue() {
  const heap = [null];
  function push(x) {
    let i = heap.push(x) - 1;
    for (; i > 1 && heap[i >> 1] > x; i >>= 1) heap[i] = heap[i >> 1];
    heap[i] = x;
  }
  function pop() {
    if (heap.length < 3) return heap.splice(1)[0];
    const least = heap[1];
    const x = heap.pop();
    let i = 1;
    for (let child = 2; child < heap.length; child = 2 * i) {
      if (heap[child + 1] < heap[child]) child++;
      if (heap[child] >= x) break;
      heap[i] = heap[child];
      i = child;
    }
    heap[i] = x;
    return least;
  }
  return { push, pop };
}

const PLACES = 2 ** 26;     // bytes of a word

function makeTokenizer({ model, added_tokens, pre_tokenizer, post_processor }) {
  const characters = byteCharacters();
  const byteOf = new Map(characters.map((c, b) => [c, b]));
  const special = new Map(added_tokens.map(({ content, id }) => [content, id]));
  const names = [];
  for (const [name, id] of Object.entries(model.vocab)) names[id] = name;
  const ranks = new Map(model.merges.map((pair, i) => [[pair].flat().join(" "), i]));
  const s = "\\p{White_Space}";
  const words = new RegExp("'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+"
    + `| ?[^${s}\\p{L}\\p{N}]+|${s}+(?![^${s}])|${s}+`, "gu");
  const cutters = [pre_tokenizer?.pretokenizers ?? pre_tokenizer].flat();
  if (cutters.some(cutter => !["ByteLevel", "Digits"].includes(cutter?.type)))
    throw new Error("its tokenizer cuts texts into words in another way");
  const digits = cutters.some(cutter => cutter.individual_digits) ? /(\p{N})/u : /(?!)/;
  const escaped = [...special.keys()].map(name => name.replace(/[^\w]/g, "\\$&"));
  const cuts = new RegExp(`(${escaped.join("|")})`);
  const template = post_processor?.single ?? [];      // it may put a begin-of-text id first
  const before = template.slice(0, template.findIndex(piece => piece.Sequence));
  const start = before.map(piece => special.get(piece.SpecialToken.id));

  // The pair of parts that was merged first in training is merged first here, too; of equal ones
  // the first in the text. A part begins at its first byte, and `after` is where the next one does.
  function merge(word) {
    const parts = [...new TextEncoder().encode(word)].map(b => characters[b]);
    const after = range(parts.length, 1);
    const before = range(parts.length, -1);
    const queue = makeQueue();
    const rank = i => after[i] < parts.length ? ranks.get(`${parts[i]} ${parts[after[i]]}`) : undefined;
    const offer = i => { if (rank(i) !== undefined) queue.push(rank(i) * PLACES + i); };
    parts.forEach((_, i) => offer(i));
    for (let least; (least = queue.pop()) !== undefined;) {
      const i = least % PLACES;
      if (parts[i] === null || rank(i) !== (least - i) / PLACES) continue;    // no longer there
      const next = after[i];
      parts[i] += parts[next];
      parts[next] = null;
      after[i] = after[next];
      before[after[i]] = i;
      offer(i);
      if (before[i] >= 0) offer(before[i]);
    }
    return parts.filter(part => part !== null).map(part => model.vocab[part]);
  }

  function encode(text) {
    const pieces = special.size ? text.split(cuts) : [text];
    return start.concat(pieces.flatMap(piece =>
      special.has(piece) ? special.get(piece)
        : piece.split(digits).flatMap(part => (part.match(words) ?? []).flatMap(merge))));
  }

  const bytes = id => special.has(names[id]) ? new TextEncoder().encode(names[id])
    : Uint8Array.from(names[id], c => byteOf.get(c));

  // A function of one token after the other: the characters that are complete with it. A character
  // may lie in several tokens.
  function reader() {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return id => decoder.decode(bytes(id), { stream: true });
  }

  function decode(ids) {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return ids.map(id => decoder.decode(bytes(id), { stream: true })).join("") + decoder.decode();
  }
  return { encode, decode, reader, bytes };
}

// --- Kernels: what kernels.wasm computes, and the memory in which it does

// Nothing is freed there. What flows through a pass is written into a ring, over what was written
// long before; tensors and caches are kept behind it.
function makeKernels(bytes, megabytes) {
  const memory = new WebAssembly.Memory({ initial: 16 * megabytes });
  const wasm = new WebAssembly.Instance(new WebAssembly.Module(bytes), { env: { memory } }).exports;
  const { buffer } = memory;
  const RING = 2 ** 25;
  let next = 0;
  let end = RING;

  function floats(count) {
    const size = 4 * Math.ceil(count / 4) * 4;
    if (next + size > RING) next = 0;
    next += size;
    return new Float32Array(buffer, next - size, count);
  }

  function keep(count, Kind = Float32Array) {
    const first = end;
    end += 16 * Math.ceil(count * Kind.BYTES_PER_ELEMENT / 16);
    if (end > buffer.byteLength) throw new Error(`more than ${megabytes} MB are needed`);
    return new Kind(buffer, first, count);
  }

  // The same numbers in this memory.
  function here(x) {
    if (x.buffer === buffer) return x;
    const copy = floats(x.length);
    copy.set(x);
    return copy;
  }

  function kept(numbers) {
    const copy = keep(numbers.length);
    copy.set(numbers);
    return copy;
  }

  // Four rows side by side, eight columns of each at a time. Matrices of other shapes stay. `wide`
  // ones in int8 become float32, which takes more memory and less time.
  function pack(tensor) {
    const { shape: [rows, width], data, scale, wide } = tensor;
    if (width === undefined) tensor.data = kept(data);
    if (width === undefined || tensor.packed || rows % 4 || width % 64) return;
    const packed = keep(data.length, wide ? Float32Array : data.constructor);
    for (let n = 0, to = 0; n < rows; n += 4)
      for (let column = 0; column < width; column += 8)
        for (let row = n; row < n + 4; row++, to += 8) {
          const from = row * width + column;
          const factor = wide ? scale[row] : 1;
          for (let i = 0; i < 8; i++) packed[to + i] = factor * data[from + i];
        }
    tensor.packed = packed.byteOffset;
    if (scale) tensor.scale = kept(scale);
  }

  function product({ shape: [rows, width], packed, scale, wide, rounds }, x) {
    const T = x.length / width;
    const y = floats(T * rows);
    let from = here(x).byteOffset;
    const args = [packed, from, y.byteOffset, width, rows, T, scale?.byteOffset ?? 0];
    if (rounds) {
      args[1] = floats(T * (width / 2 + width / 32)).byteOffset;
      wasm.round(from, args[1], width, T);
    }
    if (rounds) wasm.whole(...args);
    else (scale && !wide ? wasm.codes : wasm.floats)(...args);
    return y;
  }

  function gate(a, b) {
    a = here(a);
    wasm.gate(a.byteOffset, here(b).byteOffset, a.length);
    return a;
  }

  // Each token of a chain sees the slots up to its own.
  function attend(q, keys, values, slots, { H, Hkv, D, scale }) {
    const y = floats(q.length);
    const scores = floats(slots.at(-1) + 5).byteOffset;
    const from = here(q).byteOffset;
    for (let i = 0; i < slots.length * H; i++) {
      const head = Math.floor(i % H / (H / Hkv));
      wasm.attend(from + 4 * i * D, keys[head].byteOffset, values[head].byteOffset,
                  y.byteOffset + 4 * i * D, slots[Math.floor(i / H)] + 1, D, scale, scores);
    }
    return y;
  }
  return { floats, keep, pack, product, gate, attend };
}

// --- A program: one case per line, one answer per line

const pack = (shape, data) => ({ shape, data: Array.from(data) });
const cut = (data, i, width) => Array.from(data.slice(i * width, (i + 1) * width));
const rowsOf = ({ shape: [rows, width], data }) => range(rows).map(i => cut(data, i, width));
// (A, B, width) -> (B, A, width): from heads first to tokens first
const turned = (data, A, B, width) =>
  range(B).flatMap(b => range(A).flatMap(a => cut(data, a * B + b, width)));

function makeOps(load) {
  function blocks(r) {
    const m = load(r.model);
    const cache = makeCache(m);
    return { logits: r.blocks.map(({ first, tokens, sublayers, parents, keep: path }) => {
      const at = parents ? branches(first, parents) : span(first, tokens.length);
      const logits = run(m, tokens, at, cache, sublayers);
      if (path) keep(m, cache, first, path);
      return pack([tokens.length, m.V], logits.flatMap(row => [...row]));
    }) };
  }

  function forward(r) {
    const m = load(r.model);
    const T = r.tokens.length;
    const trace = [];
    const logits = run(m, r.tokens, span(0, T), makeCache(m), null, trace);
    const [embedded, ...sublayers] = trace.map(x => pack([T, x.length / T], x));
    return { embedded, sublayers, logits: pack([T, m.V], logits.flatMap(row => [...row])) };
  }

  function oneSublayer(r) {
    const m = load(r.model);
    const T = r.x.shape[0];
    const cache = makeCache(m);
    const { keys, values } = cache[Math.floor(r.sublayer / 2)];
    const fill = (heads, { data }) =>
      store(heads, new Float32Array(turned(data, m.Hkv, r.first, m.D)), range(r.first), m.D);
    if (r.past) fill(keys, r.past.k);
    if (r.past) fill(values, r.past.v);
    const at = { ...span(r.first, T), turns: turns(range(T, r.first), m.freqs) };
    const y = sublayer(m, r.sublayer, new Float32Array(r.x.data), at, cache);
    const written = heads => pack([m.Hkv, T, m.D],
      heads.flatMap(head => [...head.subarray(r.first * m.D, (r.first + T) * m.D)]));
    return { x: pack(r.x.shape, y), k: written(keys), v: written(values) };
  }

  function attendHeads(r) {
    const [H, T, D] = r.q.shape;
    const [Hkv, S] = r.k.shape;
    const heads = x => rowsOf({ shape: [Hkv, S * D], data: x.data });
    const shape = { ...r, H, Hkv, D };
    const y = attend(turned(r.q.data, H, T, D), heads(r.k), heads(r.v), r.mask, shape);
    return { y: pack([T, H * D], y) };
  }

  function judge(r) {
    const p = rowsOf(r.p);
    const q = r.q ? rowsOf(r.q) : r.draft.map(token => oneHot(token, r.p.shape[1]));
    const flips = r.uniforms;
    if (!r.parents) return verify(p, q, r.draft, flips, flips.at(-1));
    const { path, token } = verifyTree(p, q, r.draft, flips, flips.at(-1), r.parents);
    return { node: path.at(-1), token };
  }

  return {
    weights: r => ({ tensors: Object.fromEntries(Object.entries(load(r.model).tensors)
      .map(([name, tensor]) => [name, fingerprint(tensor)])) }),
    norm: r => ({ y: pack(r.x.shape, norm(r.x.data, r.weight.data, r.eps, r.offset)) }),
    frequencies: r => ({
      freqs: pack([r.head_dim / 2], frequencies(r.head_dim, r.theta, r.scaling)) }),
    rotate: r => ({ y: pack(r.x.shape, rotate(r.x.data, turns(r.positions, r.freqs.data))) }),
    visible: r => ({ mask: visible(r.positions, r.slots, r.end, r.tree, r.window) }),
    softcap: r => ({ y: pack(r.x.shape, r.x.data.map(x => softcap(x, r.cap))) }),
    attend: attendHeads, sublayer: oneSublayer, forward, blocks,
    uniforms: r => ({ bits: range(r.count, r.first).map(i => bits(r.seed, i)) }),
    probs: r => ({ p: pack(r.logits.shape, toProbs(r.logits.data, r.sampling)) }),
    choose: r => ({ token: choose(r.weights.data, r.u) }),
    verify: judge,
    ngram: r => ({ draft: lookup(r.text, r.n, r.gamma) }),
    rounds: r => ({ rounds: Array.from(rounds(load(r.model), r), ({ rows, ...line }) => line) }),
    race: r => ({ token: race(r.p.data, r.seed, r.position) }),
    race_rounds: r => ({ texts: r.prompts.map((prompt, b) =>
      raceText(load(r.model), r, prompt, r.seeds[b])) }),
  };
}

// Under node: the cases of standard input.
async function main() {
  const fs = require("fs");
  const models = {};
  if (process.argv[2]) kernels = makeKernels(fs.readFileSync(process.argv[2]), 1024);
  const ops = makeOps(folder => models[folder] ??= makeModel(
    JSON.parse(fs.readFileSync(`${folder}/config.json`, "utf8")),
    readTensors(new Uint8Array(fs.readFileSync(`${folder}/model.safetensors`)).buffer)));
  for await (const line of require("readline").createInterface({ input: process.stdin })) {
    const r = JSON.parse(line);
    const answer = r.op in ops ? ops[r.op](r) : { todo: true };
    console.log(JSON.stringify({ case: r.case, ...answer }));
  }
}

if (typeof module !== "undefined") {
  module.exports = { makeModel, readTensors, makeTokenizer, rounds };
  if (require.main === module) main();
}
