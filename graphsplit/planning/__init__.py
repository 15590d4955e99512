"""From a program to a plan: which operation runs where, and every move of a tensor. Makes no node."""
