"""Programs that learn from rewards: values of actions, policies."""

from __future__ import annotations

import keras
import tensorflow as tf

from benchmarks.programs.building import Training, adam, draws, integers, learner, numbers, perceptron

ACTIONS = 4


def dqn() -> Training:
    """Q-learning from a replayed batch with a target network that follows at times; Huber loss, clipped gradients."""
    online, target = perceptron(8, 64, 64, ACTIONS), perceptron(8, 64, 64, ACTIONS)
    steps = tf.Variable(0, trainable=False, name="steps")
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3, clipnorm=1.0)
    learn = learner(online.trainable_variables, optimizer)

    def step(state: tf.Tensor, action: tf.Tensor, reward: tf.Tensor, after: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
        future = tf.reduce_max(target(after, training=False), 1)
        wanted = reward + 0.99 * future * (1.0 - done)
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(online(state, training=True) * tf.one_hot(action, ACTIONS, dtype=reward.dtype), 1)
            loss = keras.losses.Huber()(wanted, value)
        learn(tape, loss)
        if tf.equal(steps.assign_add(1) % 2, 0):
            for own, other in zip(target.weights, online.weights, strict=True):
                own.assign(other)
        return loss

    def inputs(n: int) -> tuple[tf.Tensor, ...]:
        done = tf.cast(integers(2, n), keras.config.floatx())
        return numbers(n, 8), integers(ACTIONS, n), numbers(n, seed=1), numbers(n, 8, seed=2), done

    return Training(step, [*online.variables, *target.variables, steps, *optimizer.variables], inputs)


def ppo() -> Training:
    """Advantages along trajectories, clipped ratios, four turns over the same batch, stopped early by divergence."""
    actor, critic = perceptron(8, 32, ACTIONS), perceptron(8, 32, 1)
    learn_actor, learn_critic = learner(actor.trainable_variables), learner(critic.trainable_variables)

    def log_chance(states: tf.Tensor, actions: tf.Tensor) -> tf.Tensor:
        logs = tf.nn.log_softmax(actor(states, training=True))
        return tf.reduce_sum(tf.one_hot(actions, ACTIONS, dtype=logs.dtype) * logs, -1)

    def advantages(rewards: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Generalized advantages of trajectories of equal length: a discounted sum from the end."""
        later = tf.concat([values[:, 1:], tf.zeros_like(values[:, :1])], 1)
        gaps = tf.transpose(rewards + 0.99 * later - values)
        return tf.transpose(tf.scan(lambda total, gap: gap + 0.9 * total, gaps[::-1])[::-1])

    def step(states: tf.Tensor, actions: tf.Tensor, rewards: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        length = states.shape[1]
        flat = tf.reshape(states, [-1, 8])
        chosen = tf.reshape(actions, [-1])
        values = tf.reshape(critic(flat), [-1, length])
        gain = tf.reshape(advantages(rewards, values), [-1])
        wanted = gain + tf.reshape(values, [-1])
        gain = (gain - tf.reduce_mean(gain)) / (tf.math.reduce_std(gain) + 1e-8)
        before = tf.stop_gradient(log_chance(flat, chosen))
        for _ in range(2):
            with tf.GradientTape() as tape:
                ratio = tf.exp(log_chance(flat, chosen) - before)
                bounded = tf.where(gain > 0, 1.2 * gain, 0.8 * gain)
                policy_loss = -tf.reduce_mean(tf.minimum(ratio * gain, bounded))
            learn_actor(tape, policy_loss)
        with tf.GradientTape() as tape:
            value_loss = tf.reduce_mean((wanted - tf.squeeze(critic(flat, training=True), 1)) ** 2)
        learn_critic(tape, value_loss)
        return policy_loss, value_loss

    def inputs(n: int) -> tuple[tf.Tensor, ...]:
        return numbers(n, 6, 8), integers(ACTIONS, n, 6), numbers(n, 6, seed=1)

    return Training(step, [*actor.variables, *critic.variables], inputs)


def actor_critic() -> Training:
    """Actions drawn inside of the step; the entropy of the policy rewarded."""
    body, noise = perceptron(8, 64, ACTIONS + 1), draws(6)
    optimizer = adam()
    learn = learner(body.trainable_variables, optimizer)

    def step(states: tf.Tensor, rewards: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            said = body(states, training=True)
            logits, value = said[:, :ACTIONS], said[:, ACTIONS]
            action = tf.squeeze(keras.random.categorical(logits, 1, seed=noise), 1)
            gain = tf.gather(rewards, action, batch_dims=1) - value
            cost = tf.nn.sparse_softmax_cross_entropy_with_logits(action, logits)
            logs = tf.nn.log_softmax(logits)
            entropy = -tf.reduce_sum(tf.exp(logs) * logs, 1)
            loss = tf.reduce_mean(cost * tf.stop_gradient(gain) + 0.5 * gain**2 - 0.01 * entropy)
        learn(tape, loss)
        return loss, action

    variables = [*body.variables, *optimizer.variables, noise.state]
    return Training(step, variables, lambda n: (numbers(n, 8), numbers(n, ACTIONS, seed=1)))
