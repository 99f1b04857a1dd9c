"""The split training forward of LeRobot's pi0.5 with a frozen PaliGemma side.

Native:  images, language -> embeddings P --+--> 18 joint layers over [P | S], all differentiated -> velocity
         noisy actions, time -> suffix   S --+
Here:    P: no_grad, masked tokens left out, one pass, keeps only each layer's K and V        (prefix.py)
         S: 18 expert layers, each attending to the prefix's K, V and to its own              (expert.py)

The prefix never attends to the suffix, so its K and V do not depend on anything that trains; the gradient
that the native run sends back through them ends in frozen weights. Leaving it out gives the same gradients,
bit for bit where the arithmetic is the same.

Shapes: B batch, C cameras, T image tokens a camera, L language slots, N prefix tokens kept, S action tokens,
        W width, H query heads, D head size.
"""
