"""Convolutions: the input unfolded into columns makes them linear layers with one term per output position.

References:
    - Rochette, Manoel and Tramel 2019, Efficient Per-Example Gradient Computations in Convolutional Neural Networks,
      arXiv:1912.06015, for per-example gradients as a grouped convolution.
    - Bu, Mao and Xu 2022, Scalable and Efficient Training of Large Convolutional Neural Networks with Differential
      Privacy, arXiv:2205.10683, for norms by Gram matrices and the choice per layer.
"""
