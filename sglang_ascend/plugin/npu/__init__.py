"""What SGLang's Ascend path does otherwise for the step."""
