"""The synthetic linear regression of Amid et al. (2022), section 4: data, methods, and the study over dimensions."""
