"""Mistakes that were made, or nearly made, and that were silent: the loss decreases, the file is written, no error."""

# (file, text that occurs there once, text that replaces it)
PLANTED = (
    # The state of the batches is saved one batch too late: a resumed run skips one.
    ("flax_mesh/data/iterators.py", "return self._states[step]", "return self._states[max(self._states)]"),
    # The thread that prefetches batches returns the last one twice.
    ("flax_mesh/data/batches.py", "pending = pool.submit(fn, step + 1)", "pending = pool.submit(fn, step)"),
    # Every epoch has the order of the first.
    ("flax_mesh/data/batches.py", "size, seed, int(epoch))", "size, seed, 0)"),
    # Microbatches of unequal weight: the mean of means.
    ("flax_mesh/step/loss.py", "divisor = jnp.where(weight == 0, 1.0, weight)", "divisor = jnp.ones_like(weight)"),
    # A loss that is not finite is applied.
    ("flax_mesh/step/loss.py", "jnp.isfinite(value) & (value <= limit)", "jnp.isfinite(value) | (value <= limit)"),
    # Every microbatch has the dropout masks of the first.
    ("flax_mesh/step/step.py", "part, (*seeds, index), self.layers)", "part, (*seeds, 0), self.layers)"),
    # The moving average is not divided by 1 - decay^steps.
    ("flax_mesh/recipe/optimizers/average.py", "return 1 / (1 - decay**steps)", "return 1.0"),
    # Damaged bytes after the first block of a file have no effect on its checksum.
    ("flax_mesh/checkpoint/checksums.py", "value.update(buffer[:count])", "value.update(buffer[: count // 2])"),
    # A schedule without one of its backward actions trains with a wrong gradient.
    ("flax_mesh/mpmd/schedules/validate.py", "return mistakes + _missing(schedule, seen, group_of)", "return mistakes"),
    # Messages between groups are received in another order than they are sent.
    ("flax_mesh/mpmd/schedules/validate.py", "if first != other:", "if first.stage != other.stage:"),
    # A schedule that stores one activation too many is accepted.
    ("flax_mesh/mpmd/schedules/validate.py", "if peak <= limit * (1 + TOLERANCE):", "if peak <= limit + 1:"),
    # The check of a pipeline's stages does not see the operations behind a gate of zeros.
    ("flax_mesh/mpmd/split/check.py", "if at in trained and", "if at not in trained and"),
    # Positions of rotary embeddings turn in the other direction.
    (
        "flax_mesh/models/ops/rotary.py",
        "[a * cos - b * sin, b * cos + a * sin]",
        "[a * cos + b * sin, b * cos - a * sin]",
    ),
    # Packed documents attend to each other.
    (
        "flax_mesh/models/attention.py",
        "segment_ids_BS[:, None, :, None] == segment_ids_BS[:, None, None, :]",
        "segment_ids_BS[:, None, :, None] >= segment_ids_BS[:, None, None, :]",
    ),
    # A heartbeat is read as a part of the first line of a process, which is then refused.
    ("flax_mesh/processes/watchdog.py", "byte := connection.recv(1))", "byte := connection.recv(1024))"),
    # The share of an expert counts tokens instead of choices.
    ("flax_mesh/models/ops/router.py", '["expert_tokens"] / assigned_L1', '["expert_tokens"] / (assigned_L1 / k)'),
    # The balancing biases of a list of layers change by the tokens of other layers.
    ("flax_mesh/models/loss.py", "zip(model.layers, aux, strict=True)", "zip(model.layers, aux[::-1], strict=True)"),
    # The last tokens of a document predict tokens of the next one.
    ("flax_mesh/models/ops/later.py", "segment_ids_BS == shifted(segment_ids_BS, by, -1)", "segment_ids_BS > 0"),
    # The convolution of a delta net reads the last tokens of another document.
    ("flax_mesh/models/ops/delta.py", "if back and runs_BS is not None:", "if not back:"),
    # Its chunks forget the decays of the keys.
    ("flax_mesh/models/ops/delta.py", "products * decay, 0))", "products, 0))"),
    # The norm of gradients in a half type is summed in that type.
    ("flax_mesh/step/optimizer.py", "return x.astype(jnp.promote_types(x.dtype, jnp.float32))", "return x"),
    # So is the gradient of a row of an embedding that many tokens look up.
    ("flax_mesh/models/ops/lookup.py", "change_VD.astype(jnp.float32)", "change_VD"),
    # A target outside of the vocabulary has a finite loss.
    ("flax_mesh/models/cross_entropy.py", "targets < logits.shape[-1], jnp.float32(1), jnp.nan", "True, 1.0, jnp.nan"),
    # The divergence of a student from its teacher has the other direction; it lacks a factor, the temperature.
    ("flax_mesh/models/ops/divergence.py", 'self.direction == "forward"', 'self.direction == "reverse"'),
    ("flax_mesh/models/ops/divergence.py", "self.temperature**2 * jnp", "self.temperature * jnp"),
    # A checkpoint lacks the rollout that was generated ahead: a resumed run makes it again, with newer parameters.
    ("flax_mesh/data/streams/rollouts.py", "file, *jax.tree.leaves(batches))", "file, *jax.tree.leaves(batches[:1]))"),
    # Completions do not end with the end tokens of the model, but of its tokenizer alone.
    ("flax_mesh/data/prompts.py", "*end_tokens(tokenizer.path, vocab_size)} - {None}", "} - {None}"),
    # Every pair has the reference of the one before it.
    ("flax_mesh/data/preferences.py", "= self.reference[index]", "= self.reference[index - 1]"),
    # The gradients of all tokens of a chunk count alike.
    ("flax_mesh/models/cross_entropy.py", "d_GCV = d_GCV * g_NGC[n][..., None]", "d_GCV = d_GCV * g_NGC.mean()"),
    # A mask of positions that are converted to integers: blocks that it leaves are skipped.
    ("flax_mesh/blockwise/masks/bounds.py", "if is_cut else args[0]", "if False else args[0]"),
    # Keys that do not exist are divisors of 0.
    ("flax_mesh/blockwise/loops.py", "lax.concatenate([x, copies], dim)", "lax.concatenate([x, 0 * copies], dim)"),
    # The weights of a row are divided by the sum of another one.
    ("flax_mesh/blockwise/traced/find.py", "divided is None or divisor != _without(divided, k)", "divided is None"),
    # A mask that sets scores to 0 hides no key.
    ("flax_mesh/blockwise/masks/mask.py", "(at_1 > 0)\n", "(at_1 > -1)\n"),
    # The keys of a row end one after its length.
    ("flax_mesh/blockwise/fused.py", "sum(1, dtype=jnp.int32), 1)", "sum(1, dtype=jnp.int32) + 1, 1)"),
    # The sink of a kernel has another scale than its scores.
    (
        "flax_mesh/blockwise/fused.py",
        '["sink"].astype(jnp.float32)',
        '["sink"].astype(jnp.float32) * self.formula.scale',
    ),
    # A query without a key has the weights that the kernel gives to the blocks that it visits.
    (
        "flax_mesh/blockwise/fused.py",
        "if (low := self.formula.low) is None",
        "if (low := self.formula.low) is not None",
    ),
    # A mask that is added loses the gradient of queries without a key.
    ("flax_mesh/blockwise/formula.py", 'scores.is_sum or op.name != "select_n"', "scores.is_sum"),
    # A padded query sees all keys beside its sink.
    ("flax_mesh/blockwise/fused.py", 'for number, side in enumerate("kq")', 'for number, side in enumerate("k")'),
    # A run that resumes on other devices has another attention than it began with.
    ("flax_mesh/recipe/program.py", "if not restart and (began", "if restart and (began"),
)
